-- Deletes some records of a run and their payload, while the run is at a mark.
-- KEYS: run, groups, then keys to delete.  ARGV: revision and name of the mark, then names of records to delete.
-- Returns whether the run is at the mark; nothing is deleted when it is not.
local current = redis.call('HMGET', KEYS[1], 'revision', 'name')
if current[1] ~= ARGV[1] or current[2] ~= ARGV[2] then
  return 0
end
for i = 3, #KEYS do
  redis.call('UNLINK', KEYS[i])
end
for i = 3, #ARGV do
  redis.call('HDEL', KEYS[2], ARGV[i])
end
return 1
