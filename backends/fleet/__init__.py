"""Several engines behind one model, and several models behind one server."""
