"""Controller side: plan, gates, effect, verdict, report."""
