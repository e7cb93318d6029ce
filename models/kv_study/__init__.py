"""The KV caching study: an encoder-decoder, a cache by hooks, and a cache of fixed size."""
