"""The membership protocol: which workers train in a round, agreed through etcd."""
