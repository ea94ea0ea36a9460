"""What compute-sanitizer says of ours and of three faults, a line each."""
import os, shutil, subprocess, sys, time
if len(sys.argv) == 1:
    path = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.path.exists(path):
        sys.exit("compute-sanitizer is not here")
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for tool in ("memcheck", "initcheck", "racecheck"):
        for fault in ("ours", "y without a mask", "a row nobody writes", "sums in one place"):
            t0 = time.time()
            try:
                done = subprocess.run([path, "--tool", tool, sys.executable, __file__, fault],
                    capture_output=True, text=True, env=env, timeout=60)
                lines = [l for l in done.stdout.splitlines() if "SUMMARY" in l or "Invalid" in l or "Uninit" in l or "supported" in l]
                said = "; ".join(dict.fromkeys(l.strip("= ") for l in lines))[:260]
            except subprocess.TimeoutExpired:
                said = "60 s were not enough"
            print(f"{tool}, {fault}: {said} ({time.time() - t0:.0f} s)", flush=True)
else:
    sys.path[:0] = ["docs/_ext", "tests"]
    import tutorial
    page = tutorial.load("into-pytorch/02-testing")
    fault = sys.argv[1]
    norm = page.ours if fault == "ours" else page.with_fault(*page.FAULTS[fault])
    x, w, dy = page.inputs(301, 129, page.torch.float32)
    page.both_passes(norm, (x, w), dy)
    page.torch.cuda.synchronize()
    print("done")
