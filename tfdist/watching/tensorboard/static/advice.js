// SPDX-License-Identifier: Apache-2.0
// The panel that says which number of spares and workers would be best.

import {getJson} from './api.js';
import {element, empty, count, digits, short} from './format.js';

const WAIT_MS = 1000;

export class Advice {
  constructor() {
    this.list = element('div', {id: 'advice', 'aria-live': 'polite'});
    this.root = element('section', {'aria-label': 'Advice', class: 'advice'}, [
      element('h2', {text: 'Would other spares, or one worker less, help?'}), this.list,
    ]);
  }

  clear() {
    this.shown = null;
    this.show({state: 'computing'});
  }

  async load(job) {
    if (this.shown === job.id + job.updates) return;
    this.shown = job.id + job.updates;
    const mine = this.shown;
    for (;;) {
      let answer;
      try {
        answer = await getJson('advice', {job: job.id});
      } catch (error) {
        answer = {state: 'none', reason: error.message};
      }
      if (mine !== this.shown) return;
      this.show(answer);
      if (answer.state !== 'computing') return;
      await new Promise(done => { setTimeout(done, WAIT_MS); });
    }
  }

  show(answer) {
    this.list.dataset.state = answer.state;
    if (answer.state === 'computing') {
      empty(this.list).append(element('p', {text: 'Simulating…'}));
    } else if (answer.state === 'none') {
      empty(this.list).append(element('p', {text: `No estimate: ${short(answer.reason, 300)}.`}));
    } else {
      const best = element('p', {class: 'words', text: capital(short(answer.best, 200))});
      empty(this.list).append(best, ...answer.cases.map(each => row(each)), axis(), ...notes(answer));
    }
  }
}

const VERDICTS = {helps: '▲ helps', costs: '▼ costs', same: '● about the same'};
// Changes of the axis, from half to double.
const TICKS = [-50, -25, 0, 50, 100];

function capital(text) {
  return text.slice(0, 1).toUpperCase() + text.slice(1);
}

function row(found) {
  const {updates, gradients} = found;
  return element('div', {class: `case ${found.verdict}`, 'data-name': found.name}, [
    element('h3', {}, [element('span', {text: short(found.name, 60)}), element('span', {class: 'verdict', text: VERDICTS[found.verdict]})]),
    bar(gradients),
    element('p', {text: `gradients per second ${change(gradients)}; updates per second ${change(updates)}, ` +
      `each of ${count(found.gradients_per_update, 'gradient')}`}),
  ]);
}

function place(value) {
  return 50 + 50 * Math.max(-1, Math.min(1, Math.log2(value)));
}

function bar(interval) {
  const track = element('div', {class: 'interval', role: 'img', 'aria-label': change(interval)});
  const range = element('span', {class: 'range-bar'}), middle = element('span', {class: 'middle'});
  const left = Math.min(99.4, place(interval.low));
  range.style.left = `${left}%`;
  range.style.width = `${Math.max(0.6, place(interval.high) - left)}%`;
  middle.style.left = `${place(interval.middle)}%`;
  track.append(...TICKS.map(tick => {
    const line = element('span', {class: tick ? 'tick' : 'tick zero'});
    line.style.left = `${place(1 + tick / 100)}%`;
    return line;
  }), range, middle);
  return track;
}

function axis() {
  const made = element('div', {class: 'advice-axis', 'aria-hidden': 'true'});
  made.append(...TICKS.map(tick => {
    const text = element('span', {text: tick ? `${tick > 0 ? '+' : '−'}${Math.abs(tick)} %` : 'as now'});
    text.style.left = `${place(1 + tick / 100)}%`;
    return text;
  }));
  return made;
}

function change(interval) {
  const signed = value => {
    const rounded = Math.round(100 * (value - 1));
    return `${rounded > 0 ? '+' : rounded < 0 ? '−' : '±'}${Math.abs(rounded)} %`;
  };
  return `${signed(interval.middle)} (${signed(interval.low)} to ${signed(interval.high)})`;
}

function notes(answer) {
  const {simulated} = answer;
  return [element('p', {class: 'hint', text: 'Gradients per second, intervals of 90 %, by bootstrap of the measured times of ' +
    `${count(answer.updates, 'update')}, replayed with ${count(answer.workers, 'worker')} and ${count(answer.spares, 'spare')}. ` +
    `The replay makes ${digits(simulated.low)} to ${digits(simulated.high)} updates per second as it is now; measured: ` +
    `${digits(answer.measured)}. What crosses the network isn't simulated.`})];
}
