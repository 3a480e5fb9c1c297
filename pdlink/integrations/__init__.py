"""Connectors for engines that people run in production: each translates its engine's objects into pdlink's."""
