"""Files that appear complete or not at all, the locks of their writers, and object stores behind the same calls.

No torch.

file_layer              every file call of a save and of a load; `path_or_url` tells a local path from a store's URL
fsspec_object_store     an object store by way of fsspec; `object_store_read_ahead` keeps several of its requests in flight
atomic_file             written under a temporary name, synced, renamed
file_lock               locks that the system releases when a process ends
resize_storage          freeing and reallocating a tensor's memory in place (torch)
"""
