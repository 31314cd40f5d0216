"""Share a budget among many jobs. The brain of a pool decides continuously which jobs run, and with how many workers.

States of a job in a pool, and the process that makes each change:

    absent   -> waiting    `dlrover run --pool` writes its member record, bound to its lease
    waiting  -> granted    the brain writes the grant, if the budget has room now
    waiting  -> refused    the brain, if the budget never has room; the run ends with the reason
    granted  -> running    the run writes the job's first plan, fenced on its grant; its controller starts the nodes
    running  -> larger     the brain writes grant, plan and event in one transaction, if the budget has room now
    running  -> smaller    the brain, in the same way, at any time; the rest is free once its workers have ended
    any      -> absent     the run deletes grant and member record when all nodes have ended. If the run was killed, its member
                           record expires, and the brain deletes the grant once no node or worker of the job remains

One brain acts at a time. It holds the key `brain` by a lease, and each of its writes requires that key to be as it was when
the brain looked. So neither a deposed brain nor an answer that was lost can lead to a decision on an old state. A brain keeps
nothing in memory that its successor needs.

Room is counted pessimistically: a job holds the most of its grant, its plan, and its workers that run. After an outage of etcd,
leases may have expired though the processes live. So a brain that has been cut off, or has just taken over a pool with jobs in
it, gives nothing away until all of them have had the time to register again.
"""
