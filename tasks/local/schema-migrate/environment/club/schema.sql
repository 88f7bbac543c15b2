PRAGMA foreign_keys = ON;
CREATE TABLE person (
  id INTEGER PRIMARY KEY,
  first TEXT NOT NULL,
  last TEXT NOT NULL,
  born TEXT,                 -- YYYY-MM-DD
  postcode TEXT,
  city TEXT,
  joined TEXT NOT NULL,      -- YYYY-MM-DD
  fee_cents INTEGER NOT NULL
);
CREATE TABLE phone (
  person_id INTEGER NOT NULL REFERENCES person,
  number TEXT NOT NULL,
  UNIQUE (person_id, number)
);
CREATE TABLE hall (
  id INTEGER PRIMARY KEY,
  name TEXT NOT NULL UNIQUE
);
CREATE TABLE visit (
  person_id INTEGER NOT NULL REFERENCES person,
  hall_id INTEGER NOT NULL REFERENCES hall,
  day TEXT NOT NULL,         -- YYYY-MM-DD
  minutes INTEGER NOT NULL CHECK (minutes > 0)
);
CREATE TABLE reject (
  source TEXT NOT NULL,      -- members or visits
  ref TEXT NOT NULL,         -- members: no, visits: rowid
  reason TEXT NOT NULL
);
