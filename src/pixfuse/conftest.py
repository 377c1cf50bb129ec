"""Makes pytest import the whole package first.

Otherwise it imports a room by itself and sets it as an attribute of the package, in place of the function of the
same name.
"""
