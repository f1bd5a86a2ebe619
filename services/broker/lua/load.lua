-- The run as a change of the copy at a mark.
-- KEYS: run, marks, changed, groups.  ARGV: revision, name of the copy's mark (revision "0": no copy), longest time
-- between two advances of the clock that counts, microseconds.
-- Returns false when there is no run, else {revision, name, record, is_full, time of the run's clock, end of its last
-- gap, group id, record, group id, record, ...}; a record that is gone is the empty string. A copy whose mark is not in
-- this history gets everything.
local current = redis.call('HMGET', KEYS[1], 'revision', 'name', 'record')
if not current[1] then
  return false
end
local now, _, _, since = clock_now(KEYS[1], tonumber(ARGV[3]))
local reply = {current[1], current[2], '', 0, string.format('%d', now), string.format('%d', since)}
if ARGV[1] == current[1] and ARGV[2] == current[2] then
  return reply
end
reply[3] = current[3]
local known = redis.call('ZSCORE', KEYS[2], ARGV[2])
if ARGV[1] ~= '0' and known and tonumber(known) == tonumber(ARGV[1]) then
  local names = redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. ARGV[1], '+inf')
  for _, name in ipairs(names) do
    reply[#reply + 1] = name
    reply[#reply + 1] = redis.call('HGET', KEYS[4], name) or ''
  end
  return reply
end
reply[4] = 1
local all = redis.call('HGETALL', KEYS[4])
for i = 1, #all do
  reply[#reply + 1] = all[i]
end
return reply
