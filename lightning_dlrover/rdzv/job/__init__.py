"""A job's records in etcd, their keys, its history, and its folders on a host."""
