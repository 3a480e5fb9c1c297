"""Where records lie below the arena; see `base.py`."""
