"""Keys with permissions, and their limits as leases: in memory, Redis or PostgreSQL."""
