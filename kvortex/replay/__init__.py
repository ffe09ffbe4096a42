"""A request trace through the cache's own classes, without a GPU: what would hit, with which eviction policy."""
