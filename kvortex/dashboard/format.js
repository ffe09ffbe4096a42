// Numbers as people read them. GB is 10^9, as everywhere in KVortex.
const count = (value) => Math.round(value).toLocaleString("en-US");
const percent = (share) => `${(share * 100).toFixed(share > 0 && share < 0.1 ? 1 : 0)}%`;

function scaled(value, units) {
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value >= 100 || Number.isInteger(value) ? value.toFixed(0) : Number(value.toPrecision(2))} ${units[unit]}`.trim();
}

const bytes = (value) => scaled(value, ["B", "kB", "MB", "GB", "TB"]);
const bytes_per_s = (value) => `${bytes(value)}/s`;
const number = (value) => scaled(value, ["", "k", "M", "G"]);
const per_s = (value) => `${number(value)}/s`;

function seconds(value) {
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return value < 172800 ? `${Math.round(value / 3600)} h` : `${Math.round(value / 86400)} days`;
}
