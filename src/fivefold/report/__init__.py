"""Pages for a browser, each in one HTML file.

`run.py` is the page of a run (`fivefold report`). The page of a proof is in `verification/`, with the same frame,
drawing and maps.
"""
