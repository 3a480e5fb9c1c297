"""The page for people at /pdlink/, and the state that it and `pdlink top` show."""
