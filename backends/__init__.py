"""One translator per engine behind one small protocol."""
