"""Host side: host program, keeper, load client, phases. No pandas here."""
