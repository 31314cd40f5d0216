"""etcd: client, connections, mirror of a prefix, health, and the embedded server."""
