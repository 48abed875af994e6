"""Built-in pipelines, environments and rewards: links to the folders at the top of the source tree.

Under this name they cannot clash with packages of a user. They come in by entry points, as a user's plugins do.
"""
