"""Reports of commands, for a terminal and for a browser: each page is one HTML file.

`findings.py` is the record that every report is made into, for a terminal and as a page; `run.py` is the page of a run.
"""
