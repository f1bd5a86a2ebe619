"""Parts of a generator without gRPC, by the product's folders."""
