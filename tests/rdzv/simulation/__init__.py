"""A deterministic simulation of the membership protocol, with its invariants in `invariants.py`.

The code under test is the real one: `rounds.py`, `coordinator.py`, `member.py`, `membership.read_view` and the client's rule
for transactions whose answer was lost. Everything around it is simulated: time (`kernel.py`), etcd and the way to it
(`etcd.py`), processes, collectives and connections (`process.py`), nodes (`job.py`).

`faults.py` draws faults from a seed, and `run.py` plays a seed. `planted.py` holds bugs that must be found. `../simulate.py` is
the command for many seeds, or for one with its trace.
"""
