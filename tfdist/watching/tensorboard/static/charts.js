// SPDX-License-Identifier: Apache-2.0
// Charts over the same window of time: updates per second, loss, and bytes per second by task.

import {getJson} from './api.js';
import {BYTES, commonUnit, element, empty, digits, secs, short, ticks, timeTicks, tickSecs} from './format.js';
import {labels} from './timeline_texts.js';

const NS = 'http://www.w3.org/2000/svg';
const HEIGHT = 170, LEFT = 62, RIGHT = 10, TOP = 22, BOTTOM = 24;
const MOST_TASKS = 4;
const NUMBERS = [['', 1, 0]];
const VALIDATION = 6;

export class Charts {
  constructor(timeWindow) {
    this.window = timeWindow;
    this.speed = chart('speed', 'Updates per second');
    this.loss = chart('loss', 'Loss');
    this.bytes = chart('bytes', 'Bytes per second');
    this.root = element('section', {'aria-label': 'Throughput, loss and bytes', class: 'charts'},
      [this.speed.root, this.loss.root, this.bytes.root]);
    this.clear();
  }

  clear() {
    this.data = null;
    this.events = [];
    this.losses = [];
    this.tasks = [];
  }

  setJob(job, isOther) {
    this.job = job;
    if (isOther) this.clear();
  }

  setWindow(data) { this.data = data; }

  // Events of all workers, and losses of some: the rates show them.
  setEvents(events) {
    this.events = events;
    this.draw();
  }

  async loadScalars(job) {
    const {series, losses} = await getJson('scalars', {job: job.id});
    if (this.job.id !== job.id) return;
    this.losses = losses;
    this.lines = series.length;
    // The tasks whose lines are highest; a figure with more can't be read. Their order and colours are those of their names.
    const size = new Map();
    for (const each of series) size.set(each.name, Math.max(size.get(each.name) || 0, ...each.points.map(point => Math.abs(point[2]))));
    const largest = [...size.keys()].sort((one, other) => size.get(other) - size.get(one)).slice(0, MOST_TASKS);
    this.tasks = series.filter(each => largest.includes(each.name))
      .sort((one, other) => one.name.localeCompare(other.name, 'en', {numeric: true}) || (one.direction < other.direction ? 1 : -1));
    this.draw();
  }

  draw() {
    if (!this.job) return;
    const view = {...this.window, begin: this.window.begin, end: this.window.end, low: this.window.low, events: this.events};
    if (this.data) this.drawSpeed(view);
    this.loss.root.hidden = !this.losses.length;
    const losses = this.losses.map((each, i) => ({...each, style: `c${i} ${each.name}`, marked: true, points: each.points.map(point => [point[0], point[2]])}));
    const isShown = lines(this.loss, losses, {...view, named: true, fits: true});
    this.loss.note.textContent = isShown ? '' : 'none in this window';
    this.bytes.root.hidden = !this.tasks.length;
    const colour = colours(this.tasks);
    lines(this.bytes, this.tasks.map(each => ({
      name: `${each.name} ${each.direction}`, style: `${colour(each.name)} ${each.direction}`, points: each.points.map(point => [point[0], point[2]]),
    })), {...view, units: BYTES, named: true});
    this.bytes.note.textContent = (this.lines > this.tasks.length ? `the ${this.tasks.length} largest of ${this.lines} lines; ` : '') +
      'each point is the mean since the point before';
    this.bytes.root.dataset.series = this.tasks.length;
  }

  drawSpeed(view) {
    const {data} = this;
    const sum = (name, first = 0, last = data.buckets) => {
      const row = data.update_channels.indexOf(name) * data.buckets;
      return data.totals.subarray(row + first, row + last).reduce((one, other) => one + other, 0);
    };
    const updates = sum('updates'), length = data.end - data.begin;
    // Buckets with less than some updates each would show their rhythm and not their rate.
    const joined = Math.max(3, Math.min(data.buckets, Math.ceil(data.buckets / Math.max(1, updates / 20))));
    const points = [];
    for (let i = 0; i < data.buckets; i += joined) {
      const last = Math.min(data.buckets, i + joined);
      const rate = sum('updates', i, last) / ((last - i) * data.secs);
      points.push([data.begin + i * data.secs, rate], [data.begin + last * data.secs, rate]);
    }
    lines(this.speed, [{name: 'updates', style: 'c0', points}], view);
    const examples = sum('examples');
    this.speed.note.textContent = [
      `${digits(updates / length)} updates/s`, examples > 0 ? `${digits(examples / length)} examples/s` : '',
      updates > 0 ? `each update waited ${secs(sum('update_wait_secs') / updates)} for its last gradient` : '',
    ].filter(Boolean).join(', ') + ' in this window';
    this.speed.root.dataset.total = updates;
  }
}

// A colour for each task by its kind, and by its place among those of its kind.
function colours(series) {
  const kinds = {chief: ['c6'], ps: ['c4', 'c1'], worker: ['c0', 'c2', 'c3', 'c5']};
  const names = [...new Set(series.map(each => each.name))];
  return name => {
    const kind = name.split(':')[0], given = kinds[kind] || kinds.worker;
    return given[names.filter(each => each.startsWith(`${kind}:`)).indexOf(name) % given.length];
  };
}

function chart(id, title) {
  const svg = document.createElementNS(NS, 'svg');
  svg.setAttribute('height', HEIGHT);
  svg.setAttribute('role', 'img');
  svg.setAttribute('aria-label', title);
  const note = element('p', {class: 'hint', id: `${id}-note`}), names = element('ul', {class: 'legend lines'});
  return {svg, note, names, root: element('figure', {id}, [element('h2', {text: title}), svg, names, note])};
}

// `fits`: the axis begins at the least value, not at 0.
// Returns true if something of them is in the window.
function lines(target, series, {begin, end, low, events, units = NUMBERS, named, fits}) {
  const {svg} = target, WIDTH = svg.parentElement.clientWidth || 500;
  empty(svg);
  empty(target.names);
  const place = time => LEFT + (time - begin) / (end - begin) * (WIDTH - LEFT - RIGHT);
  const shown = series.map(each => ({...each, points: inside(each.points, begin - 1e-6, end + 1e-6)}));
  const values = shown.flatMap(each => each.points.map(point => point[1]));
  const top = Math.max(...values, fits ? -Infinity : 0), bottom = fits ? Math.min(...values) : 0;
  const room = fits ? 0.08 * (top - bottom) || 0.05 * Math.abs(top) || 1 : 0.05 * top;
  const most = values.length ? top + room || 1 : 1, least = values.length && fits ? bottom - room : 0;
  const height = value => HEIGHT - BOTTOM - (value - least) / (most - least) * (HEIGHT - TOP - BOTTOM);
  for (const event of events.filter(each => each.worker < 0 || each.kind < VALIDATION)) {
    const left = Math.max(LEFT, place(event.time)), right = Math.min(WIDTH - RIGHT, place(event.time + event.secs));
    if (right < LEFT || left > WIDTH - RIGHT) continue;
    drawn(svg, 'rect', {class: `event kind${event.kind}`, x: left, width: Math.max(1, right - left), y: TOP - 4, height: HEIGHT - BOTTOM - TOP + 4});
  }
  const near = events.filter(event => event.time + event.secs >= begin && event.time <= end);
  labels(near, place, WIDTH - RIGHT, text => 6 * text.length, (text, x) => {
    drawn(svg, 'text', {x, y: TOP - 9, 'text-anchor': 'middle', class: 'label'}).textContent = text;
  });
  const scale = ticks(least, most, 4), {unit, text} = commonUnit(scale.values, units, scale.step);
  for (const value of values.length ? scale.values : []) {
    drawn(svg, 'line', {class: 'grid', x1: LEFT, x2: WIDTH - RIGHT, y1: height(value), y2: height(value)});
    drawn(svg, 'text', {x: LEFT - 6, y: height(value) + 4, 'text-anchor': 'end'}).textContent = `${text(value)} ${unit}`.trim();
  }
  const axis = timeTicks(begin - low, end - low, 5);
  for (const value of axis.values) {
    const x = place(low + value);
    drawn(svg, 'text', {x, y: HEIGHT - 6, 'text-anchor': x > WIDTH - 40 ? 'end' : 'middle'}).textContent = tickSecs(value, axis.step);
  }
  for (const each of shown) {
    const path = each.points.map((point, k) => `${k ? 'L' : 'M'}${place(point[0]).toFixed(1)},${height(point[1]).toFixed(1)}`);
    drawn(svg, 'path', {class: `line ${each.style}`, d: path.join(''), 'data-name': each.name});
    for (const point of each.marked && each.points.length < 60 ? each.points : []) {
      drawn(svg, 'circle', {class: each.style, cx: place(point[0]), cy: height(point[1]), r: 2.5});
    }
    if (named) {
      const sample = document.createElementNS(NS, 'svg');
      sample.setAttribute('class', 'sample');
      drawn(sample, 'path', {class: `line ${each.style}`, d: 'M0,5L28,5'});
      target.names.append(element('li', {}, [sample, element('span', {text: short(each.name, 60)})]));
    }
  }
  return values.length > 0;
}

// The points of a line between two times; where it enters and leaves, a point between its neighbours.
function inside(points, begin, end) {
  const kept = [];
  points.forEach((point, i) => {
    const before = points[i - 1];
    for (const time of before ? [begin, end] : []) {
      if (before[0] < time && time < point[0]) {
        kept.push([time, before[1] + (time - before[0]) / (point[0] - before[0]) * (point[1] - before[1])]);
      }
    }
    if (point[0] >= begin && point[0] <= end) kept.push(point);
  });
  return kept;
}

function drawn(parent, tag, attributes) {
  const made = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  parent.append(made);
  return made;
}
