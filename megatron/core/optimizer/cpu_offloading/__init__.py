"""The update of optimizer state that lies in host memory or in files."""
