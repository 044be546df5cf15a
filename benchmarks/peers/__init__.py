"""One module per library of benchmarks/quantizers.py, each run as a process by the Python that has the library."""
