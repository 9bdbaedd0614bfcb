"""Timings against peers: `python -m benchmarks.NAME` prints them and writes results/bench_NAME.json."""
