"""The KV caching study: an encoder-decoder, a cache installed by hooks, and static caches for export."""
