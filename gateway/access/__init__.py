"""Who calls: API keys, tenants and roles."""
