-- Deletes a run's last keys, while the run is at a mark.
-- KEYS: run, then every other key.  ARGV: revision and name of the mark ("" and "": there must be no run).
-- Returns whether the run is at the mark; nothing is deleted when it is not.
local current = redis.call('HMGET', KEYS[1], 'revision', 'name')
if (current[1] or '') ~= ARGV[1] or (current[2] or '') ~= ARGV[2] then
  return 0
end
for i = 1, #KEYS do
  redis.call('UNLINK', KEYS[i])
end
return 1
