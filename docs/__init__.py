"""The documentation, and the command that writes its measured part: `python -m docs.make_results`."""
