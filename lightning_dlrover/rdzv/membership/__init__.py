"""Who trains: rounds of workers, agreed through etcd."""
