"""What every command shares: settings that become flags, one-line errors, progress, the versions of a run.

Read `settings.py` first (a setting is described once, where it is a field), then `command_line.py`.
"""
