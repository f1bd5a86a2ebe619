"""How contents travel between processes: files under way, the HTTP server, relays, rates."""
