"""Torch's process groups as one worker uses them: connect, wait, transfer, sever and end."""
