"""What the engines receive and send."""
