"""A data set in an object store: its index, the cache of verified blocks, fetching ahead."""
