"""Turns workers from one role to the other when the load has shifted: off unless `roles.mode` says otherwise."""
