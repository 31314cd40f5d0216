"""Screens of running jobs: `dlrover top` in a terminal.

All of them draw the pictures of `report/view_model.py`, and act through the functions of `dlrover scale` and `drain`. Their
libraries are extras, which are imported only when a screen opens.
"""
