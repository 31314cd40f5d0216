PREEMPTIVE = {"complementary"}


def make_policy(name, settings):
    def policy(state):
        order = sorted([*[(0, r.since_s, r.job, r.devices) for r in state.running]], key=lambda x: x[1])
        out = {r.job.name: r.devices for r in state.running}
        n = {d.name: 0 for d in state.devices}
        for w in out.values():
            for d in w:
                n[d] += 1
        most = 1 if name == "sequential" else 99
        for j in sorted(state.waiting, key=lambda j: (-j.priority, j.submitted_s)):
            for d in state.devices:
                if n[d.name] < min(most, d.places):
                    n[d.name] += 1
                    out[j.name] = (d.name,)
                    break
        return out

    return policy
