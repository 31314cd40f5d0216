import test_stand_in_jobs as m
CASES = m.CASES
import os, time
def test_dbg(make_job):
    name, fault = os.environ["CASE"], os.environ.get("FAULT", "")
    case = CASES[name]
    jobs = []
    def make(*a, **k):
        jobs.append(make_job(*a, **k)); return jobs[-1]
    t = time.time()
    bad = case.problems(make, fault)
    print("PROBLEMS", [b[:3000] for b in bad], time.time() - t)
    job = jobs[0]
    for w in job.workers:
        print("-----", w.name, w.exit_code)
        last = None
        for r in w.records():
            if r["kind"] in ("killed", "after_fit", "fit_start", "val_start", "val_done","entered") or last is None or r["at"] - last > 0.5 or (r["kind"]=="done" and r["step"]%50==0):
                print(round(r["at"] - t, 2), {k: v for k, v in r.items() if k in ("kind", "moment", "step", "round", "world", "metric", "rank")})
            last = r["at"]
        print(w.output[-6000:])
    print([ (e.kind, e.data) for k in ("round","loss","stall","stalled") for e in job.events(k)])
