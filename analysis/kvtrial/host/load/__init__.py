"""The measuring load client: `client` is its boundary; how it measures is told in docs/load-client.md."""
