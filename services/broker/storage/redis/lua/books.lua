-- Every counter of the books, and the commit after which they stood so.
-- KEYS: run, books.
-- Returns false when there is no run, else {revision, name, counter, count, counter, count, ...}.
local current = redis.call('HMGET', KEYS[1], 'revision', 'name')
if not current[1] then
  return false
end
local reply = {current[1], current[2]}
local counters = redis.call('HGETALL', KEYS[2])
for i = 1, #counters do
  reply[#reply + 1] = counters[i]
end
return reply
