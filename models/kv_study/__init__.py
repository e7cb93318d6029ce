"""The KV caching study: an encoder-decoder, and caches by hooks, of fixed size, paged, in int8, and with a window."""
