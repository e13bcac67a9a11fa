"""Checks of this machine for `preheat doctor`: each returns findings, and reads its facts through an argument."""
