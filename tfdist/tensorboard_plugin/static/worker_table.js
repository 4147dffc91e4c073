// SPDX-License-Identifier: Apache-2.0
// The table of workers. The one that delays the updates most is first; a click on a heading sorts by that column.

import {element, empty, count, digits, percent, secs, short, whole} from './format.js';

const COLUMNS = [
  ['name', 'Worker', row => short(row.name, 40), 'Name of the worker'],
  ['delay_secs', 'Delays updates by', row => secs(row.delay_secs), 'Sum over the updates in which its gradient entered last: time since the last but one'],
  ['last', 'Last in', row => count(row.last, 'update'), 'Updates in which its gradient entered last'],
  ['input_p50', 'Input, median', row => secs(row.input_p50), 'Median time in which it waited for its batch'],
  ['compute_p50', 'Gradient, median', row => secs(row.compute_p50), 'Median time from start to arrival'],
  ['compute_p95', '95th percentile', row => secs(row.compute_p95), '95th percentile of the time from start to arrival'],
  ['accepted', 'Accepted', row => whole(row.accepted), 'Gradients that entered an update'],
  ['dropped', 'Dropped', row => `${whole(row.dropped)} (${percent(row.dropped / Math.max(1, row.accepted + row.dropped))})`, 'Gradients that were late and dropped'],
  ['lost', 'Lost', row => whole(row.lost), 'Gradients lost with their worker'],
  ['wait_secs', 'Waited', row => secs(row.wait_secs), 'Time from the arrival of accepted gradients to their update'],
  ['held_secs', 'Held back', row => secs(row.held_secs), 'Time in which the worker had delivered a gradient and might not start the next one'],
  ['staleness_mean', 'Staleness', row => `${digits(row.staleness_mean)} (most ${whole(row.staleness_max)})`, 'Mean of the accepted gradients, and maximum'],
];
// Columns that are shown even if all their cells are zero.
const ALWAYS = new Set(['name', 'delay_secs', 'compute_p50', 'compute_p95', 'accepted']);
const FIRST_ROWS = 12;

export class WorkerTable {
  constructor(chosen) {
    this.chosen = chosen;
    // Without a key in the order of the server: the slow ones first.
    this.sorting = {key: null, descending: true};
    this.rows = [];
    this.isOpen = false;
    this.body = element('tbody');
    this.heads = COLUMNS.map(([key, text, , title]) => {
      const button = element('button', {type: 'button', title, text});
      button.addEventListener('click', () => this.sort(key));
      return element('th', {scope: 'col', 'data-key': key}, [button]);
    });
    this.more = element('button', {type: 'button', class: 'more', hidden: ''});
    this.more.addEventListener('click', () => { this.isOpen = !this.isOpen; this.draw(); });
    this.note = element('p', {class: 'hint'});
    this.words = element('p', {class: 'words', id: 'in-words'});
    this.root = element('section', {'aria-label': 'Workers', id: 'workers'}, [
      element('h2', {text: 'Workers, by what they cost'}), this.words,
      element('div', {class: 'scroll', tabindex: '0', role: 'region', 'aria-label': 'Table of workers'},
        [element('table', {}, [element('thead', {}, [element('tr', {}, this.heads)]), this.body])]),
      this.more, this.note,
    ]);
  }

  show(job, workers) {
    this.rows = workers.rows;
    this.words.textContent = workers.in_words;
    this.words.classList.toggle('slow', this.rows.some(row => row.is_slow));
    this.note.textContent = job.aggregated_updates
      ? `Delays and percentiles are of the newest ${count(workers.detail_updates, 'update')}; older ones are kept in sums.` : '';
    this.draw();
  }

  clear() {
    this.rows = [];
    this.draw();
  }

  sort(key) {
    const {sorting} = this;
    this.sorting = {key, descending: sorting.key === key ? !sorting.descending : key !== 'name'};
    this.draw();
  }

  draw() {
    const {key, descending} = this.sorting;
    const hidden = new Set(COLUMNS.map(column => column[0]).filter(each =>
      !ALWAYS.has(each) && this.rows.every(row => !row[each])));
    const order = (one, other) => (typeof one[key] === 'string'
      ? one[key].localeCompare(other[key], 'en', {numeric: true}) : one[key] - other[key]);
    const sorted = key ? [...this.rows].sort((one, other) => (descending ? -1 : 1) * order(one, other)) : this.rows;
    for (const head of this.heads) {
      head.hidden = hidden.has(head.dataset.key);
      head.setAttribute('aria-sort', head.dataset.key === key ? (descending ? 'descending' : 'ascending') : 'none');
    }
    const most = Math.max(...this.rows.map(row => row.delay_secs), 0);
    const shown = this.isOpen ? sorted : sorted.slice(0, FIRST_ROWS);
    empty(this.body).append(...shown.map(row => this.line(row, most, hidden)));
    this.more.hidden = sorted.length <= FIRST_ROWS;
    this.more.textContent = this.isOpen ? 'Show fewer' : `Show all ${sorted.length} workers`;
  }

  line(row, most, hidden) {
    const cells = COLUMNS.filter(column => !hidden.has(column[0])).map(([key, , text]) => {
      const cell = element(key === 'name' ? 'th' : 'td', key === 'name' ? {scope: 'row'} : {'data-key': key});
      if (key === 'name') {
        const button = element('button', {type: 'button', class: 'link', text: text(row), title: 'Mark its lane in the timeline'});
        button.addEventListener('click', () => this.chosen(row.worker));
        cell.append(button);
      } else {
        cell.textContent = text(row);
        cell.dataset.value = row[key];
      }
      if (key === 'delay_secs' && most) {
        cell.classList.add('bar-cell');
        cell.style.setProperty('--part', `${100 * row.delay_secs / most}%`);
      }
      return cell;
    });
    return element('tr', {'data-worker': row.worker, ...(row.is_slow ? {class: 'slow'} : {})}, cells);
  }
}
