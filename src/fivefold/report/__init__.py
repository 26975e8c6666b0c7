"""What a person opens in a browser: pages in one HTML file each.

`run.py` is the page of a run (`fivefold report`). That of a proof lies in `verification/`, in the same frame, with the
same drawing and maps.
"""
