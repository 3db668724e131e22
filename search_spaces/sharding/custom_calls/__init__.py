"""Operations that no compiler sees into, as vertices with a sharding rule, a price and a form on one device's part."""
