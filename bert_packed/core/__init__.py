"""Shared by all commands: settings that become flags, one-line errors, files, progress, versions.

Read `settings.py` first (a setting is described once, where it is a field), then `command_line.py`.
"""
