"""Checks of this machine, its packages, etcd and a script before a job; `dlrover doctor` prints them."""
