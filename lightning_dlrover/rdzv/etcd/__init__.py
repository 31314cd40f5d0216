"""Connections to etcd, and the embedded server."""
