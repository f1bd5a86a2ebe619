-- Stores peers' latest views, and appends to the busy spans of some.
-- KEYS: peers, then a list of spans for each peer that has new ones.
-- ARGV: seconds for which silent peers are kept, number of spans to keep of each peer, number of views; then
--   name and view ..., then for each list the number of new spans, and these.
local life, num_kept = ARGV[1], tonumber(ARGV[2])
local at = 4
for _ = 1, tonumber(ARGV[3]) do
  redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 1])
  at = at + 2
end
redis.call('EXPIRE', KEYS[1], life)
for i = 2, #KEYS do
  local last = at + tonumber(ARGV[at])
  for first = at + 1, last, 1000 do
    redis.call('RPUSH', KEYS[i], unpack(ARGV, first, math.min(first + 999, last)))
  end
  redis.call('LTRIM', KEYS[i], -num_kept, -1)
  redis.call('EXPIRE', KEYS[i], life)
  at = last + 1
end
return true
