"""Pictures of a converted model: first as data, then as one self-contained page or as static files.

A page runs nothing but its own script and asks no network for anything. Every count in a picture is that of the
checkpoint; where a picture shows a part only, it says so.
"""
